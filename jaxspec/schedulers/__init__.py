"""Schedulers: which resident rows take part in a round."""

from jaxspec.schedulers.base import Scheduler
from jaxspec.schedulers.continuous import Continuous
from jaxspec.schedulers.pool import Pool
from jaxspec.schedulers.static import Static

__all__ = ["Continuous", "Pool", "Scheduler", "Static"]
