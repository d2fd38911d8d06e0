"""How quantised weights become numbers: one codec a stored form, one table of forms (`formats`)."""
