"""The online proxy that chat clients talk to.

One request: `turns` parses a body, `sessions` finds the conversation it continues, `policy` decides the route from
the `workers` registry's view, a connector builds the legs, `dispatch` runs them, `relay` carries the answer's bytes,
and what was learnt goes back to sessions, metrics and `receipts`.
"""
