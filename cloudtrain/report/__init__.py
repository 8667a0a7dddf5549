"""Write one HTML page about a run.

* `report`: the page. `markup`: escaped HTML and charts. `curves`: metrics as lines.
  `live_data`: lines, nodes and use so far.
"""
