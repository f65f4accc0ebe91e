"""The command line: `nestpipe draw`, `nestpipe simulate` and their kin."""
