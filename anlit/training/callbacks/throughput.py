"""How much was trained and how fast: tokens seen, training seconds, tokens per second, MFU."""

import time
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops

# Lightning's table gives the H200 twice its dense bf16 peak; NVIDIA's data sheet says 989 TFLOP/s without sparsity.
DENSE_PEAK = {"h200": {torch.bfloat16: 989e12, torch.float16: 989e12}}


class Throughput(L.Callback):
    """Counts tokens and seconds over the whole run, across resumes, and logs them.

    `train/tokens` and `val/tokens` are training tokens seen by all ranks; `train/seconds` and `val/seconds` are the
    wall-clock of training with its data loading, validation left out. Both are in the checkpoint. MFU is logged
    where the device's peak is known.
    """

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0
        self._mark = 0.0
        self._logged = (0, 0.0)
        self._peak: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens, self.seconds = state_dict["tokens"], state_dict["seconds"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._mark = time.perf_counter()
        self._logged = (self.tokens, self.seconds)
        self._peak = peak_flops(pl_module.device, trainer.precision)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        self.seconds += now - self._mark
        self._mark = now
        self.tokens += batch.tokens.numel() * trainer.world_size
        tokens, seconds = self.tokens - self._logged[0], self.seconds - self._logged[1]
        if trainer.global_step % trainer.log_every_n_steps or not seconds:  # type: ignore[attr-defined]
            return
        rate = tokens / seconds
        values = {"train/tokens": float(self.tokens), "train/seconds": self.seconds}
        if self._peak:
            decoder: Any = pl_module.model
            flops = decoder.flops_per_token(batch.tokens.shape[1])
            values["train/mfu"] = rate * flops / (self._peak * trainer.world_size)
        pl_module.log_dict(values)
        pl_module.log("train/tokens_per_second", rate, prog_bar=True)
        self._logged = (self.tokens, self.seconds)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit":
            pl_module.log_dict({"val/tokens": float(self.tokens), "val/seconds": self.seconds})


def peak_flops(device: torch.device, precision: str | int | None) -> float | None:
    """Dense peak in FLOP/s of `device` at a Trainer precision such as `bf16-mixed`; None where it is not known."""
    if device.type != "cuda":
        return None
    low = {"bf": torch.bfloat16, "16": torch.float16}.get(str(precision)[:2], torch.float32)
    name = torch.cuda.get_device_name(device).lower()
    for key, peaks in DENSE_PEAK.items():
        if key in name and low in peaks:
            return peaks[low]
    return get_available_flops(device, low)
