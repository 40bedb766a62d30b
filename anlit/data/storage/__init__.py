"""Reading prepared folders: manifest, index, chunks on disk or in a bucket, and their cache."""
