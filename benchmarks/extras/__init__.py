"""The smaller tables of single-task merging, one question a file."""
