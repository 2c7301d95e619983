"""A read-only web page over run directories: runs, curves, configs, logs, transcripts, who waits for whom.

It only ever reads: no file is opened for writing below a served directory, no route takes a path.
"""
