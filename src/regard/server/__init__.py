"""HTTP servers. `regard look`: `page_server`, `page_app`, `registry`, `explain`; for this machine only.

`regard serve`: `service_server`, `service_app`, `gateway`, `pool`, and an interface in each `*_api`.
"""
