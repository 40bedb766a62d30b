"""From a corpus's source files to a prepared folder."""
