"""A matrix from rows on two ranks to columns on two others, through agents, by tensorbus; see from_etha_job.py."""

import sys

from from_etha_job import move, serve

from tensorbus.etha import TensorBusAgent, bootstrap_client

if sys.argv[1] == "agent":
    serve(TensorBusAgent)
else:
    move(bootstrap_client, sys.argv[1])
