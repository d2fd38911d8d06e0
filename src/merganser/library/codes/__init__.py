"""Codes of one tensor's difference from the base, in a fraction of its bytes.

`encode` makes a blob with one of the codes of `catalogue.CODES`, `decode` reads it. Start with `coding`.
"""
