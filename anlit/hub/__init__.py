"""Models as folders for `transformers`: in one of its architectures if that is exact, else with custom code."""
