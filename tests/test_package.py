"""What `import anlit` offers."""

import anlit


def test_dir_shows_the_classes() -> None:
    assert {"AnGPT", "GPT", "NGPT", "RoPE", "TextFiles", "load_checkpoint", "__version__"} <= set(dir(anlit))
