"""The command line: `nestpipe draw`, `nestpipe simulate` and the other commands."""
