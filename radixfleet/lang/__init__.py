"""The language: programs over a model. `api` is what a program is written with, `program` what runs it."""
