"""The command line `plainsong`: one file for each family of verbs; options, output and errors are shared."""
