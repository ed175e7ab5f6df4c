"""The equivalence auditor: is this output the target's own, and where not, why not?"""
