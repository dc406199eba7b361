"""What the command line does with stores, one subcommand a file."""
