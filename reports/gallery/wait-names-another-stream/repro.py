"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   gain: [2] = input
#   v: [1, 2] = input
#   rms_norm: [1, 2] = rms_norm(v, gain, 1e-06)
#   all_reduce: [1, 2] = all_reduce(v, 0, [0, 1])
#   return (rms_norm, all_reduce)

PASS = 'tests.mutants.multistream:WaitNamesMainStream'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'schedule': True,
    'overlap': True,
}
KIND = 'stream-conflict'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"unifo'
    'rm","scale":1.0}}],"graphs":[{"nodes":[{"name":"gain","op":"placeholder","target":"","args":[],"val"'
    ':{"shape":[2],"stride":[1],"dtype":"float32","alias":0}},{"name":"v","op":"placeholder","target":"",'
    '"args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"rms_norm","op":'
    '"call_function","target":"tensor_cast::rms_norm","args":[{"node":"v"},{"node":"gain"},1e-06],"val":{'
    '"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":2},"meta":{"cost_s":1e-06}},{"name":"all_redu'
    'ce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"v"},{"rank_constant":"r'
    'ank"},{"rank_constant":"dp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":3},"meta'
    '":{"cost_s":1e-06}},{"name":"output","op":"output","target":"","args":[{"tuple":[{"node":"rms_norm"}'
    ',{"node":"all_reduce"}]}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"dp":[0,1]}},{"graph":0,"con'
    'stants":{"rank":1,"dp":[0,1]}}],"seed":0,"labels":["layers=0","bsh","bf16","mixed-dtypes","two-group'
    's","reordered","extra-outputs","overlap","branches=2","all-reduce","binary","fused-norm","matmul","n'
    'orm","reduce-scatter","split","unary","view","timed"],"streams":{"compute":[0],"comm":[1],"sync_over'
    'head_s":0.0,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
