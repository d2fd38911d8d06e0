"""The studio: a local web application over a folder of checkpoints, recipes, libraries and studies.

Start reading at `app.create_app`. Work that takes long runs as a job (`jobs`), a subprocess of our own commands whose
state is on disk; the mixer and what is like it run on one model in memory (`player`). The page itself is `static/`,
built from the sources in `studio/` at the top of the repository.
"""
