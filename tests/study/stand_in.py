"""What `anlit fit` leaves in a run folder, made without training: `stand_in.py SECONDS_PER_STEP --option=…`.

The loss falls from 5 towards a value that the options decide; the state after each of ten steps is the checkpoint. It
imports the standard library only, so it starts at once. Whoever writes into a folder that another process writes into
leaves the file `mishaps`.
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
    seconds, options = float(arguments[0]), arguments[1:]
    values = dict(option.removeprefix("--").split("=", 1) for option in options if "=" in option)
    folder = Path(values["run_dir"])
    lr, seed = float(values.get("model.init_args.lr", 0.2)), int(values.get("seed_everything", 0))
    if values.get("model.init_args.fail") == "true":
        print("error: it was to fail")
        return 2
    name = "AnGPT" if "angpt.yaml" in " ".join(options) else "GPT"
    target = (
        {"GPT": 3.0, "AnGPT": 2.8}[name]
        + abs(lr - 0.2)
        + 0.01 * (zlib.crc32(f"{name}{seed}".encode()) % 7)
    )
    model = {"class_path": f"anlit.{name}", "init_args": {"lr": lr}}
    data = {"class_path": "anlit.TextFiles", "init_args": {"seed": seed}}
    replace(
        folder / "config.yaml", json.dumps({"seed_everything": seed, "model": model, "data": data})
    )
    checkpoint, writer, run = (
        folder / "checkpoint",
        (folder / "writer").open("w"),
        folder / "run.json",
    )
    try:
        fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        (folder / "mishaps").touch()
    done = int(checkpoint.read_text()) if checkpoint.exists() else 0
    with (folder / "starts").open("a") as starts:
        starts.write(f"{done}\n")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    replace(run, json.dumps(RECORD | {"status": "running"}))
    with (folder / "metrics.csv").open("a" if done else "w") as metrics:
        if not done:
            metrics.write("step,val/loss,val/tokens,val/seconds,val/bits_per_byte\n")
        for step in range(done + 1, STEPS + 1):
            time.sleep(seconds)
            loss = target + (5 - target) * (1 - step / STEPS) ** 2
            metrics.write(f"{step},{loss},{step * 1000},{step},{loss / 3}\n")
            metrics.flush()
            replace(checkpoint, str(step))
    replace(run, json.dumps(RECORD | {"status": "finished"}))
    return 0


def replace(path: Path, text: str) -> None:
    (partial := path.with_suffix(".partial")).write_text(text)
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
