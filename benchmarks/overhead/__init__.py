"""What does the proxy cost, beside other routers and beside no proxy at all?"""
