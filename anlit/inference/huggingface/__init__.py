"""Models as folders of `transformers`: in an architecture that it has where that is exact, else with code of their own.

Nothing here imports transformers, but for `modelling`, whose files go into the folders.
"""
