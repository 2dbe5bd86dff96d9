"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   w: [2, 2] = input
#   v: [1, 2] = input
#   v_1: [2] = input
#   all_reduce: [1, 2] = all_reduce(v, 0, [0])
#   add: [1, 2] = add(all_reduce, all_reduce)
#   matmul: [2] = matmul(v_1, w)
#   return (add, matmul)

PASS = 'tests.mutants.multistream:WaitForAnotherProducer'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'schedule': True,
    'overlap': True,
}
KIND = 'race'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"w","shape":[2,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}},{"name":"v_1","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"unifo'
    'rm","scale":1.0}}],"graphs":[{"nodes":[{"name":"w","op":"placeholder","target":"","args":[],"val":{"'
    'shape":[2,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"v","op":"placeholder","target":""'
    ',"args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"v_1","op":"pla'
    'ceholder","target":"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":2}},{"name'
    '":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"v"},{"rank_c'
    'onstant":"rank"},{"rank_constant":"dp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alia'
    's":3},"meta":{"cost_s":1e-06}},{"name":"add","op":"call_function","target":"python::add","args":[{"n'
    'ode":"all_reduce"},{"node":"all_reduce"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","ali'
    'as":4},"meta":{"cost_s":1e-06}},{"name":"matmul","op":"call_function","target":"aten::matmul","args"'
    ':[{"node":"v_1"},{"node":"w"}],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":5},"meta":{'
    '"cost_s":1e-05}},{"name":"output","op":"output","target":"","args":[{"tuple":[{"node":"add"},{"node"'
    ':"matmul"}]}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"dp":[0]}},{"graph":0,"constants":{"rank'
    '":1,"dp":[1]}}],"seed":0,"labels":["layers=0","flat","bf16","mixed-dtypes","two-groups","reordered",'
    '"extra-outputs","overlap","branches=3","all-reduce","binary","cast","cat","fused-reduce","in-place",'
    '"matmul","norm","operator","split","unary","view","timed"],"streams":{"compute":[0],"comm":[1],"sync'
    '_overhead_s":0.0,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
