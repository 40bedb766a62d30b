"""Foreign and damaged files of which no other folder has a test: nothing foreign runs, and one sentence says why."""

import re
from pathlib import Path

import anlit
from anlit.cli import main
from tests.checkpoints.conftest import trained_run
from tests.checkpoints.foreign import as_run

__all__ = ["trained_run"]
UNPICKLES = re.compile(r"pickle\.load|Unpickler|FileSystemReader")
RESTRICTED = re.compile(r"torch\.load\([^()]*(\([^()]*\)[^()]*)*weights_only=True")


def test_nothing_unpickles_and_torch_load_takes_tensors_and_plain_values_alone() -> None:
    for file in Path(anlit.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert not UNPICKLES.search(text), file
        assert text.count("torch.load(") == len(RESTRICTED.findall(text)), file


def test_a_tag_for_python_in_a_config_makes_nothing(trained_run: Path, tmp_path: Path, capsys) -> None:
    copy, marker = as_run(trained_run, tmp_path, {}), tmp_path / "marker"
    config = copy / "config.yaml"
    config.write_text(f"x: !!python/object/apply:os.system ['mkdir {marker}']\n{config.read_text()}")
    assert main(["validate", f"--config={config}"]) == 2
    assert "config.yaml cannot be read (could not determine a constructor" in capsys.readouterr().err
    assert not marker.exists()
