"""The sections that a study may ask for in its report, one file each."""
