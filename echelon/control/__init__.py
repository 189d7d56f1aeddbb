"""The wires a run is steered by: who may speak (token), over which interface (net), in what frames (rpc), as whom (member)."""
