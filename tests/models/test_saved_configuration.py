"""A configuration that leaves out attention and positions is written with their classes, and can be read again."""

from pathlib import Path

import pytest
import yaml

from anlit.cli import main


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    with pytest.raises(SystemExit):
        main(["fit", *arguments, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize("model", ["GPT", "NGPT", "AnGPT"])
def test_default_parts_are_written_as_classes(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = printed(capsys, f"--model={model}", "--data=PythonSources")
    settings = config["model"]["init_args"]
    assert settings["attention"]["class_path"] == "anlit.Plain"
    assert settings["positions"] == {"class_path": "anlit.RoPE", "init_args": {"fraction": 0.5, "base": 10000.0}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert printed(capsys, f"--config={tmp_path}/config.yaml") == config
