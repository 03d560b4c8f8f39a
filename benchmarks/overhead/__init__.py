"""What a proxy costs, beside other routers: the parts of `proxy_overhead.py`."""
