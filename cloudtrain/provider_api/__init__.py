"""Define the border between cloudtrain and a platform, and the values that cross it.

* `protocol`: Provider, Request, Status, LogPage, Layout. `node`: what a node is given. `launch_spec`: what starts.
* `registry`: find a provider by its name. `catalog`: machines and prices. `limits`: money as seconds.
* `checks`: one check of ``cloudtrain doctor``.
"""
