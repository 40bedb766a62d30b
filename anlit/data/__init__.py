"""Corpora, their shards and the batches read from them."""
