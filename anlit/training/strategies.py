"""Fully sharded data parallel training (FSDP2) as a Trainer strategy."""

import pickle
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from anlit.checkpoints import sharded
from anlit.checkpoints.averages import AVERAGES, CURRENT, STATE, separate_averages
from anlit.checkpoints.checkpoint_io import (
    AtomicCheckpointIO,
    rename_parameters,
)
from anlit.checkpoints.integrity import UNREADABLE, DamagedError, verify
from anlit.checkpoints.location import is_sharded
from anlit.checkpoints.newest import damaged_checkpoint, read_without_shards
from anlit.errors import UserError
from anlit.nn.layers.precision import wide_dtype
from anlit.nn.layers.sharded import local_tensor
from anlit.training.lightning_internals import connect_ranks


class FullySharded(ModelParallelStrategy):
    """Shards parameters, gradients and optimizer states over the ranks.

    Each block is gathered while it runs. Master weights are float32; with `precision: bf16-mixed`
    matrix products are in bfloat16.

    Args:
        replicas: Number of complete copies of the model. Each is sharded over
            world size / replicas ranks (hybrid sharding). With one replica per node, parameters
            are gathered inside nodes only.
        gather_dtype: The dtype in which parameters are sent and used. bfloat16 halves the traffic,
            and rounds gains too.
        reduce_dtype: The dtype in which gradients are summed.
        reshard_after_forward: Free a block's gathered parameters after its forward pass. False
            needs more memory and two thirds of the traffic.
        async_checkpoints: Write the shards in the background, from a copy in host memory.
        process_group_backend: nccl or gloo; null takes the device's backend.
        timeout_minutes: The longest wait for ranks that may be dead. Checkpoints in the background
            have it too.
    """

    def __init__(
        self,
        replicas: int = 1,
        gather_dtype: Literal["float32", "bfloat16"] = "float32",
        reduce_dtype: Literal["float32", "bfloat16"] = "float32",
        reshard_after_forward: bool = True,
        async_checkpoints: bool = False,
        process_group_backend: str | None = None,
        timeout_minutes: float = 10.0,
    ) -> None:
        timeout = timedelta(minutes=timeout_minutes)
        super().__init__("auto", "auto", True, process_group_backend, timeout)
        self.replicas = replicas
        self.policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, gather_dtype),
            reduce_dtype=getattr(torch, reduce_dtype),
            cast_forward_inputs=False,
        )
        self.reshard_after_forward = reshard_after_forward
        self._checkpoints = sharded.ShardedCheckpoints(async_checkpoints, timeout)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        """Connect the ranks. Raises UserError first if `replicas` does not divide their number."""
        self.check_replicas(self.replicas, self.num_nodes * self.num_processes)
        connect_ranks(self, self._make_mesh)
        self.checkpoint_io = self._files = AtomicCheckpointIO()

    @staticmethod
    def check_replicas(replicas: int, n_ranks: int) -> None:
        """Raise UserError if `replicas` does not divide the number of ranks."""
        if n_ranks % replicas:
            raise UserError(
                f"trainer.strategy.replicas={replicas} does not divide the number of ranks, "
                f"{n_ranks}: choose one that does"
            )

    def _make_mesh(self) -> DeviceMesh:
        """The mesh of ranks, (replicas, ranks of a replica); one axis for a single replica."""
        device_type = self.root_device.type
        n_shards = self.world_size // self.replicas
        if self.replicas == 1:
            return init_device_mesh(device_type, (n_shards,), mesh_dim_names=("shard",))
        sizes = (self.replicas, n_shards)
        return init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard"))

    def setup(self, trainer: L.Trainer) -> None:
        """Shard the decoder and draw missing weights; then Lightning sets up the optimizer."""
        module: Any = self.lightning_module
        decoder = module.model
        if not isinstance(decoder, FSDPModule):  # a second fit or validate finds it sharded
            settings: dict[str, Any] = {"mesh": self.device_mesh, "mp_policy": self.policy}
            for block in decoder.blocks:
                fully_shard(block, **settings, reshard_after_forward=self.reshard_after_forward)
            fully_shard(decoder, **settings)
            decoder.draw_missing(self.root_device)
        # FSDP2 keeps the tensors of the first forward pass. After an evaluation in inference mode
        # training could not write into them. With gloo Lightning does not use this mode.
        for loop in (trainer.validate_loop, trainer.test_loop):
            loop.inference_mode = False
        super().setup(trainer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        path = self.broadcast(str(filepath))
        self._files.written.add(path)  # only these are ever removed
        for key in sharded.WEIGHTS:
            if key in checkpoint:
                checkpoint[key] = self._with_tied_marks(checkpoint[key], key)
        self._checkpoints.save(checkpoint, Path(path))

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load weights and optimizer states into the shards; returns everything else.

        Lightning numbers an optimizer's parameters in the order of the model. torch numbers them by
        groups, and so does the single file of another strategy. Raises UserError if the checkpoint
        is damaged or of another model.
        """
        module: Any = self.lightning_module
        path = Path(self.broadcast(str(checkpoint_path)))
        try:
            if not self._is_fit:  # for a fit, the command has verified
                self._verify(path)
            content = read_without_shards(path)
            if self._is_fit:
                separate_averages(content)
            weights = content.pop("state_dict")
            averages = content.pop(AVERAGES, None)
            content.pop(CURRENT, None)
            module.on_load_checkpoint(content)  # refuses another model before its weights do
            states = content.pop("optimizer_states", [])
            optimizers = self.optimizers
            if module.begins_new_optimizer or not self._is_fit:
                states = []
                optimizers = []
            if is_sharded(path):
                averages = self._load_shards(path, states, optimizers, STATE in content)
            else:
                self._load_file(weights, states, optimizers)
        except (DamagedError, pickle.UnpicklingError) as error:
            raise damaged_checkpoint(path, error) from error
        if averages is not None:
            content[AVERAGES] = averages
        return content

    @property
    def _is_fit(self) -> bool:
        module: Any = self.lightning_module
        return module.trainer.state.fn == TrainerFn.FITTING

    def _verify(self, path: Path) -> None:
        """Compare the checkpoint's checksums on rank 0; all ranks raise DamagedError."""
        problem = ""
        if self.is_global_zero:
            try:
                verify(path)
            except UNREADABLE as error:
                problem = str(error)
        problem = self.broadcast(problem)
        if problem:
            raise DamagedError(problem)

    def _load_shards(
        self,
        path: Path,
        saved_states: list[dict[str, Any]],
        optimizers: list[Optimizer],
        has_averages: bool,
    ) -> dict[str, Tensor] | None:
        """Read this rank's rows into the tensors of the model and of empty optimizer states.

        Returns the averages of weights, if the checkpoint has them and the run continues. An
        evaluation has them in the model.
        """
        model: Any = self.model
        tensors: dict[str, Tensor] = {}
        weights = self._with_tied_marks(dcp_state.get_model_state_dict(model), "state_dict")
        averages = self._room_for_averages(weights) if has_averages else None
        states = [dcp_state.get_optimizer_state_dict(model, optimizer) for optimizer in optimizers]
        entries: dict[str, Any] = {"state_dict": weights, "optimizer_states": states}
        if averages is not None:
            entries["state_dict"] = averages
            if self._is_fit:
                entries[CURRENT] = weights
        sharded.without_tensors(entries, tensors)
        expected = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        headers = sharded.read_headers(path)
        # The states of a replaced optimizer stay unread.
        names = expected | headers if optimizers else expected
        for name in names:
            if expected.get(name) != headers.get(name):
                raise DamagedError(
                    f"{name} is {headers.get(name)} in its shards, and {expected.get(name)} in "
                    "the model"
                )
        sharded.read_into(tensors, path)
        saved_states = sharded.with_tensors(saved_states, tensors)
        options = dcp_state.StateDictOptions(cpu_offload=True)
        for optimizer, state in zip(optimizers, saved_states, strict=True):
            dcp_state.set_optimizer_state_dict(model, optimizer, state, options=options)
        if averages is None or self._is_fit:
            return averages
        for name, average in averages.items():
            local_tensor(weights[name]).copy_(local_tensor(average))
        return None

    def _room_for_averages(self, weights: dict[str, Any]) -> dict[str, Tensor]:
        """Tensors without values for the averages of these weights, as checkpoints have them."""
        model: Any = self.model
        parameters = dict(model.named_parameters())
        averages = {}
        for name, weight in weights.items():
            if isinstance(weight, Tensor):
                dtype = wide_dtype(weight) if name in parameters else weight.dtype
                averages[name] = torch.empty_like(weight, dtype=dtype)
        return averages

    def _load_file(
        self, weights: Any, saved_states: list[dict[str, Any]], optimizers: list[Optimizer]
    ) -> None:
        """Distribute the content of a single file, which every rank has read, over the ranks."""
        model: Any = self.model
        options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        dcp_state.set_model_state_dict(model, weights, options=options)
        names = {parameter: name for name, parameter in model.named_parameters()}
        for optimizer, state in zip(optimizers, saved_states, strict=False):
            parameters: list[Any] = []
            for group in optimizer.param_groups:
                parameters += group["params"]
            names_by_number = {n: names[parameter] for n, parameter in enumerate(parameters)}
            state_by_name = rename_parameters(state, names_by_number)
            dcp_state.set_optimizer_state_dict(model, optimizer, state_by_name, options=options)

    def _with_tied_marks(self, weights: dict[str, Any], key: str) -> dict[str, Any]:
        """The weights of a checkpoint's `key`, with a mark in place of a tied head.

        safetensors holds no tensors that share memory.
        """
        model: Any = self.model
        names: dict[nn.Parameter, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first_name = names.setdefault(parameter, name)
            if first_name != name:
                weights[name] = f"{sharded.MARK}{key}.{first_name}"
        return weights

    def wait_for_checkpoints(self) -> None:
        """Wait until a checkpoint in the background is complete."""
        self._checkpoints.wait()

    def on_exception(self, exception: BaseException) -> None:
        with suppress(Exception):  # the run has failed, and other ranks may be gone
            self.wait_for_checkpoints()
        super().on_exception(exception)

    def teardown(self) -> None:
        self.wait_for_checkpoints()
        super().teardown()
