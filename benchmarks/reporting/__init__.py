"""The page of results: parts (text, tables, figures) made from stored records, and how they are written."""
