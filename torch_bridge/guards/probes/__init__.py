"""What instrumented code (`instrument`) does in the places of attribute reads, items, operators, calls and writes.

Each probe does what the statement did and tells the thread's `Observer`, if there is one; without one it does just that. The rules of Python's data model are
spelled out here where they decide what is read: attribute look-up through classes, instances and `__getattr__`; who is asked by an operator.

Instrumented code and those who follow calls ask for the names below; each file has the probes of one kind of statement.
"""

from torch_bridge.guards.probes.arguments import check_arguments
from torch_bridge.guards.probes.attribute_writes import attribute_before, delete_attribute, set_attribute, store, update_attribute
from torch_bridge.guards.probes.attributes import attribute, standard
from torch_bridge.guards.probes.calling import call, fresh, refuse
from torch_bridge.guards.probes.contexts import context
from torch_bridge.guards.probes.imports import imported, imported_from
from torch_bridge.guards.probes.items import delete_item, item, item_before, key_label, make_slice, set_item, update_item
from torch_bridge.guards.probes.iteration import iterate, merged
from torch_bridge.guards.probes.kinds import ITERATORS, VIEWS
from torch_bridge.guards.probes.membership import container
from torch_bridge.guards.probes.operators import compared, formatted, hashed, identified, joined, operand, printed
from torch_bridge.guards.probes.truth_values import condition, truth
from torch_bridge.guards.probes.updates import update

__all__ = [
    "ITERATORS",
    "VIEWS",
    "attribute",
    "attribute_before",
    "call",
    "check_arguments",
    "compared",
    "condition",
    "container",
    "context",
    "delete_attribute",
    "delete_item",
    "formatted",
    "fresh",
    "hashed",
    "identified",
    "imported",
    "imported_from",
    "item",
    "item_before",
    "iterate",
    "joined",
    "key_label",
    "make_slice",
    "merged",
    "operand",
    "printed",
    "refuse",
    "set_attribute",
    "set_item",
    "standard",
    "store",
    "truth",
    "update",
    "update_attribute",
    "update_item",
]
