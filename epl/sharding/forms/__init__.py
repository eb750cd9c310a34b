"""Local implementations: operators that need more than themselves to run on shards.

A form is called as ``form(ranks, cut, **arguments)`` with the operator's arguments under the names of its schema, tensors
as this rank holds them, and gives what this rank holds of the result (a tuple of several). Autograd runs through it; where
it talks to other ranks, it brings its own backward.
"""

from __future__ import annotations

from epl.sharding.forms import attention, indexing, losses, normalisation, ordering, random
from epl.sharding.forms.base import Cut, Form

__all__ = ["FORMS", "PLACED", "Cut", "Form"]

FORMS: dict[str, Form] = {
    **attention.FORMS,
    **indexing.FORMS,
    **losses.FORMS,
    **normalisation.FORMS,
    **ordering.FORMS,
    **random.FORMS,
}

_PLACED = """attention bernoulli cross_entropy_classes embedding_rows experts gather index_rows index_select nll_classes
topk best.aten.max.dim best.aten.min.dim best.aten.argmax.default best.aten.argmin.default"""

PLACED = frozenset(_PLACED.split())
"""The forms that ask where in the whole a part begins, so that it must be of as many stretches as the option says.

To all others, as to operators without a form, a part may come in more: to dropout after ``flatten`` of a cut sequence.
"""
