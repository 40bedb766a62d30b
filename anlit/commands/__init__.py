"""One file for each subcommand: its options, and the call of what does the work; `support` is what they share."""
