"""The intermediate representation: frozen graphs, their text form, and a check of every invariant."""
