"""The subcommands that need a parser of classes: LightningCLI as anlit wires it, and its complaints in one sentence."""
