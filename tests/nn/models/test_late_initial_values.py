"""Weights that are drawn late: a parameter or buffer that nothing sets is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from anlit import GPT, Runtime
from anlit.errors import UserError
from anlit.nn.models.gpt import GPTBlock, GPTDecoder
from anlit.training.language_model import LanguageModel
from tests.nn.models.tiny import architectures, tiny

CPU = torch.device("cpu")


class Tables(nn.Module):
    """A tensor of each kind, set in the constructor only."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("angles", torch.ones(3, dtype=torch.complex64), persistent=False)
        self.register_buffer("numbers", torch.arange(3))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("empty", torch.zeros(0, dtype=torch.long))


class SetTables(Tables):
    def reset_parameters(self) -> None:
        for tensor in (self.gain, self.angles, self.numbers, self.mask):
            tensor.detach().copy_(torch.ones(3))


def with_tables(make_tables: Callable[[], nn.Module]) -> type[LanguageModel]:
    """A GPT whose blocks have the tensors."""

    class TablesBlock(GPTBlock):
        def __init__(self, config, layer: int) -> None:
            super().__init__(config, layer)
            self.tables = make_tables()

    class TablesDecoder(GPTDecoder):
        block_class = TablesBlock

    class TablesGPT(GPT):
        decoder_class = TablesDecoder

    return TablesGPT


def setting_all_but(name: str) -> type[Tables]:
    class Forgetful(Tables):
        def reset_parameters(self) -> None:
            for other in ("gain", "angles", "numbers", "mask"):
                if other != name:
                    getattr(self, other).detach().copy_(torch.ones(3))

    return Forgetful


@pytest.mark.parametrize("name", ["gain", "angles", "numbers", "mask"])
def test_a_tensor_that_nothing_sets_is_refused_by_name(name: str) -> None:
    model = tiny(with_tables(setting_all_but(name)), runtime=Runtime(meta_init=True))

    message = f"leaves blocks.0.tables.{name} without initial values.*Forgetful.reset_parameters"
    with pytest.raises(UserError, match=message):
        model.model.draw_missing(CPU)


def test_a_module_without_reset_parameters_is_refused() -> None:
    model = tiny(with_tables(Tables), runtime=Runtime(meta_init=True))

    with pytest.raises(UserError, match=r"blocks\.0\.tables\.gain"):
        model.model.draw_missing(CPU)


def test_tensors_that_reset_parameters_sets_are_accepted() -> None:
    late = tiny(with_tables(SetTables), runtime=Runtime(meta_init=True)).model
    late.draw_missing(CPU)

    for tensor in (late.blocks[1].tables.gain, late.blocks[1].tables.mask):
        assert tensor.bool().all()


@architectures
def test_weights_drawn_late_are_those_of_a_model_with_memory(architecture) -> None:
    settings = {"attention_gate": "per_head", "attention_norm": True, "qk_norm_gain": True}
    late = tiny(architecture, runtime=Runtime(meta_init=True), qk_clip=1.0, **settings).model
    late.draw_missing(CPU)

    expected: dict[str, Tensor] = tiny(architecture, qk_clip=1.0, **settings).model.state_dict()
    assert late.state_dict().keys() == expected.keys()
    for name, weight in late.state_dict().items():
        assert weight.equal(expected[name]), name


def test_a_sharded_parameter_that_nothing_sets_is_refused() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = tiny(with_tables(Tables), runtime=Runtime(meta_init=True))
        fully_shard(model.model, mesh=init_device_mesh("cpu", (1,)))

        with pytest.raises(UserError, match=r"blocks\.0\.tables\.gain"):
            model.model.draw_missing(CPU)
    finally:
        distributed.destroy_process_group()
