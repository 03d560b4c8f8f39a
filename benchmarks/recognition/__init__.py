"""How well do the proxy's beliefs about caches match what engines hold, prompt by prompt and token by token?"""
