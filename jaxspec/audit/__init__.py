"""The equivalence auditor: is this output the target's own, and where it is not, why?"""
