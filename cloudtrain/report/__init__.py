"""Write one HTML page about a run.

* `report`: the page. `markup`: escaped HTML and charts. `curves`: metrics as lines.
"""
