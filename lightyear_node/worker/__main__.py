"""`python -m lightyear_node.worker` is the worker process."""

from lightyear_node.worker.jobs import serve

if __name__ == "__main__":
    serve()
