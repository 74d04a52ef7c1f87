"""For pip at the top of a checkout: builds what is in python/."""

import os

os.chdir("python")

from scikit_build_core.build import *  # noqa: E402, F403
