"""What do modes find cached, move and compute on real engines that evict, and are the texts right?"""
