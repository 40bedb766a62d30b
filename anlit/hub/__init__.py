"""Models as folders for transformers: in an equal architecture if there is one, else with code."""
