"""What the subcommands share: the parser, its messages, what a configuration may say, the run folder."""
