"""Fully sharded data parallel training (FSDP2) as a Trainer strategy."""

import pickle
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from anlit.checkpoints import sharded
from anlit.checkpoints.checkpoint_io import (
    AtomicCheckpointIO,
    by_number,
    read_without_parts,
    rename_parameters,
)
from anlit.checkpoints.integrity import UNREADABLE, DamagedError, damaged, verify
from anlit.checkpoints.location import is_sharded
from anlit.errors import UserError
from anlit.training.lightning_internals import connect_ranks


class FullySharded(ModelParallelStrategy):
    """Parameters, gradients and optimizer states are sharded over the ranks; each block is gathered while it runs.

    Master weights are float32; with `precision: bf16-mixed` matrix products are in bfloat16.

    Args:
        replicas: Number of complete copies of the model, each sharded over world size / replicas ranks (hybrid
            sharding). With one replica per node, parameters are gathered inside nodes only.
        gather_dtype: In which parameters are sent and used. bfloat16 halves the traffic, and rounds gains too.
        reduce_dtype: In which gradients are summed.
        reshard_after_forward: Free a block's gathered parameters after its forward pass. False needs more memory and
            two thirds of the traffic.
        sharded_checkpoints: Each rank writes its part into a folder; otherwise rank 0 writes one file.
        async_checkpoints: Write the parts in the background, from a copy in host memory.
        process_group_backend: nccl or gloo; by default that of the device.
        timeout_minutes: How long a rank, and a checkpoint in the background, waits for ranks that may be dead.
    """

    def __init__(
        self,
        replicas: int = 1,
        gather_dtype: Literal["float32", "bfloat16"] = "float32",
        reduce_dtype: Literal["float32", "bfloat16"] = "float32",
        reshard_after_forward: bool = True,
        sharded_checkpoints: bool = True,
        async_checkpoints: bool = False,
        process_group_backend: str | None = None,
        timeout_minutes: float = 10.0,
    ) -> None:
        timeout = timedelta(minutes=timeout_minutes)
        super().__init__("auto", "auto", sharded_checkpoints, process_group_backend, timeout)
        self.replicas = replicas
        self.policy = MixedPrecisionPolicy(
            getattr(torch, gather_dtype), getattr(torch, reduce_dtype), cast_forward_inputs=False
        )
        self.reshard_after_forward, self.writes_parts = reshard_after_forward, sharded_checkpoints
        self._checkpoints = sharded.ShardedCheckpoints(async_checkpoints, timeout)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        """Connect the ranks; raises UserError before they wait for each other if `replicas` does not divide them."""
        if (ranks := self.num_nodes * self.num_processes) % self.replicas:
            given = f"trainer.strategy.replicas={self.replicas}"
            raise UserError(
                f"{given} does not divide the number of ranks, {ranks}: choose one that does"
            )
        connect_ranks(self, self._make_mesh)
        self.checkpoint_io = self._files = AtomicCheckpointIO()

    def _make_mesh(self) -> DeviceMesh:
        sizes, names = (self.replicas, self.world_size // self.replicas), ("replicate", "shard")
        first = int(self.replicas == 1)
        return init_device_mesh(self.root_device.type, sizes[first:], mesh_dim_names=names[first:])

    def setup(self, trainer: L.Trainer) -> None:
        """Shard the decoder and draw missing weights; then Lightning sets up the optimizer."""
        module: Any = self.lightning_module
        decoder = module.model
        if not isinstance(decoder, FSDPModule):  # in a second fit or validate it is sharded already
            settings: dict[str, Any] = {"mesh": self.device_mesh, "mp_policy": self.policy}
            for block in decoder.blocks:
                fully_shard(block, **settings, reshard_after_forward=self.reshard_after_forward)
            fully_shard(decoder, **settings)
            decoder.draw_missing(self.root_device)
        super().setup(trainer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        path = self.broadcast(str(filepath))
        if self.writes_parts:
            self._files.written.add(path)  # others are never removed
            checkpoint["state_dict"] = self._without_shared(checkpoint["state_dict"])
            self._checkpoints.save(checkpoint, Path(path))
        else:
            super(ModelParallelStrategy, self).save_checkpoint(checkpoint, path, storage_options)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """This rank's part of the state, by parameter name. For a single file: all of it on rank 0, in torch's form."""
        if self.writes_parts:
            return super().optimizer_state(optimizer)
        assert self.model is not None
        bare = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = dcp_state.get_optimizer_state_dict(self.model, bare, options=options)
        return by_number(state) if self.global_rank == 0 else {}

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load weights and optimizer states of either form of checkpoint into the shards; returns the rest.

        Raises UserError if it is damaged or another model's. Lightning numbers an optimizer's parameters in the order
        of the model; torch, and so a single file, by groups.
        """
        module: Any = self.lightning_module
        path = Path(self.broadcast(str(checkpoint_path)))
        try:
            if (
                module.trainer.state.fn != TrainerFn.FITTING
            ):  # before a fit, the command line has looked
                self._verify(path)
            rest = read_without_parts(path)
            weights = rest.pop("state_dict")
            module.on_load_checkpoint(rest)  # refuses another model's before its weights do
            saved, optimizers = rest.pop("optimizer_states", []), self.optimizers
            if module.begins_new_optimizer:
                saved, optimizers = [], []
            if is_sharded(path):
                self._load_parts(path, saved, optimizers)
            else:
                self._load_file(weights, saved, optimizers)
        except (DamagedError, pickle.UnpicklingError) as error:
            raise damaged(path, error) from error
        return rest

    def _verify(self, path: Path) -> None:
        """Compare the checkpoint's sums on rank 0; all ranks raise DamagedError if they do not fit."""
        problem = ""
        if self.is_global_zero:
            try:
                verify(path)
            except UNREADABLE as error:
                problem = str(error)
        if problem := self.broadcast(problem):
            raise DamagedError(problem)

    def _load_parts(
        self, path: Path, saved: list[dict[str, Any]], optimizers: list[Optimizer]
    ) -> None:
        """Read this rank's rows into the tensors of the model and of empty optimizer states."""
        model: Any = self.model
        tensors: dict[str, Tensor] = {}
        weights = self._without_shared(dcp_state.get_model_state_dict(model))
        states = [dcp_state.get_optimizer_state_dict(model, optimizer) for optimizer in optimizers]
        sharded.without_tensors({"state_dict": weights, "optimizer_states": states}, tensors)
        here, there = (
            {name: (x.shape, x.dtype) for name, x in tensors.items()},
            sharded.read_headers(path),
        )
        for name in (here | there) if optimizers else here:  # a new optimizer leaves states unread
            if here.get(name) != there.get(name):
                raise DamagedError(
                    f"{name} is {there.get(name)} in its parts, and {here.get(name)} in the model"
                )
        sharded.read_into(tensors, path)
        for optimizer, state in zip(optimizers, sharded.with_tensors(saved, tensors), strict=True):
            options = dcp_state.StateDictOptions(cpu_offload=True)
            dcp_state.set_optimizer_state_dict(model, optimizer, state, options=options)

    def _load_file(
        self, weights: Any, saved: list[dict[str, Any]], optimizers: list[Optimizer]
    ) -> None:
        model: Any = self.model
        options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        dcp_state.set_model_state_dict(model, weights, options=options)
        names = {parameter: name for name, parameter in model.named_parameters()}
        for optimizer, state in zip(optimizers, saved, strict=False):
            parameters = [
                parameter for group in optimizer.param_groups for parameter in group["params"]
            ]
            named = rename_parameters(
                state, {n: names[parameter] for n, parameter in enumerate(parameters)}
            )
            before = [dict(group) for group in optimizer.param_groups]
            dcp_state.set_optimizer_state_dict(model, optimizer, named, options=options)
            for group, settings in zip(
                optimizer.param_groups, before, strict=True
            ):  # tuples come back as lists
                group |= {
                    key: tuple(group[key])
                    for key, value in settings.items()
                    if isinstance(value, tuple)
                }

    def _without_shared(self, weights: dict[str, Any]) -> dict[str, Any]:
        """The weights with a mark in place of a tied head: safetensors has no tensors that share memory."""
        model: Any = self.model
        first: dict[nn.Parameter, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if first.setdefault(parameter, name) != name:
                weights[name] = f"{sharded.MARK}state_dict.{first[parameter]}"
        return weights

    def wait_for_checkpoints(self) -> None:
        """Wait until a checkpoint that is written in the background is complete."""
        self._checkpoints.wait()

    def on_exception(self, exception: BaseException) -> None:
        with suppress(Exception):  # the run has failed, and other ranks may be gone
            self.wait_for_checkpoints()
        super().on_exception(exception)

    def teardown(self) -> None:
        self.wait_for_checkpoints()
        super().teardown()
