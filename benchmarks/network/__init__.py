"""Do conversations get the right texts over a bad network between the proxy and its workers?"""
