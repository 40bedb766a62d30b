"""Prepared folders as they are read: manifest and index, chunks on the disk or in a bucket, and the cache of these."""
