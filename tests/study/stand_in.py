"""Write a run folder as `anlit fit`, without training: `stand_in.py SECONDS_PER_STEP --option=…`.

The loss falls from 5 towards a value that the options decide. The checkpoint is the number of steps
so far, of ten or `trainer.max_steps`. With a callback every step's checkpoint is kept. The script
imports only the standard library, so it starts at once. If two processes write into the same
folder, the file `mishaps` appears.
"""

import fcntl
import json
import os
import signal
import sys
import time
import zlib
from pathlib import Path

STEPS = 10
RECORD = {
    "parameters": 1000,
    "command": "anlit fit",
    "data": {"content_sha256": "c0", "tokenizer_sha256": "t0"},
}


def main(arguments: list[str]) -> int:
    seconds = float(arguments[0])
    options = arguments[1:]
    values = dict(option.removeprefix("--").split("=", 1) for option in options if "=" in option)
    folder = Path(values["run_dir"])
    lr = float(values.get("model.init_args.lr", 0.2))
    seed = int(values.get("seed_everything", 0))
    if values.get("model.init_args.fail") == "true":
        print("error: it was to fail")
        return 2
    name = "AnGPT" if "angpt.yaml" in " ".join(options) else "GPT"
    noise = 0.01 * (zlib.crc32(f"{name}{seed}".encode()) % 7)
    target = {"GPT": 3.0, "AnGPT": 2.8}[name] + abs(lr - 0.2) + noise
    model = {"class_path": f"anlit.{name}", "init_args": {"lr": lr}}
    data = {"class_path": "anlit.TextFiles", "init_args": {"seed": seed}}
    config = {"seed_everything": seed, "model": model, "data": data}
    n_steps = int(values.get("trainer.max_steps", STEPS))
    if "trainer.max_steps" in values:
        config["trainer"] = {"max_steps": n_steps}
        model["init_args"]["schedule"] = json.loads(values["model.init_args.schedule"])
    replace(folder / "config.yaml", json.dumps(config))
    checkpoint = folder / "checkpoint"
    begin = folder / "checkpoints" / "last.ckpt"
    if begin.exists() and not checkpoint.exists():
        checkpoint.write_text(begin.read_text())
    run = folder / "run.json"
    writer = (folder / "writer").open("w")
    try:
        fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        (folder / "mishaps").touch()
    n_steps_done = int(checkpoint.read_text()) if checkpoint.exists() else 0
    with (folder / "starts").open("a") as starts:
        starts.write(f"{n_steps_done}\n")
    (folder / "threads").write_text(os.environ["OMP_NUM_THREADS"])
    (folder / "gpus").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    replace(run, json.dumps(RECORD | {"status": "running"}))
    with (folder / "metrics.csv").open("a") as metrics:
        if not metrics.tell():
            metrics.write("step,val/loss,val/tokens,val/seconds,val/bits_per_byte\n")
        for step in range(n_steps_done + 1, n_steps + 1):
            time.sleep(seconds)
            loss = target + (5 - target) * (1 - step / n_steps) ** 2
            metrics.write(f"{step},{loss},{step * 1000},{step},{loss / 3}\n")
            metrics.flush()
            if "trainer.callbacks+" in values:
                begin.parent.mkdir(exist_ok=True)
                replace(begin.with_name(f"step-{step:08d}.ckpt"), str(step))
            replace(checkpoint, str(step))
    replace(run, json.dumps(RECORD | {"status": "finished"}))
    return 0


def replace(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
