"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   w: [2, 2] = input
#   w_2: [2, 1] = input
#   matmul_all_reduce: [1, 2] = matmul_all_reduce(x, w, None, 0, [0, 2])
#   matmul: [1, 2] = matmul(x, w)
#   matmul_1: [2, 1] = matmul(w, w_2)
#   all_reduce: [2, 1] = all_reduce(matmul_1, 0, [0, 1])
#   return (matmul, all_reduce, matmul_all_reduce)

PASS = 'tests.mutants.multistream:CostsOrderCollectives'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'schedule': True,
    'overlap': True,
}
KIND = 'deadlock'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":4,"dims":[{"name":"dp","groups":[[0,2]'
    ',[1,3]]},{"name":"tp","groups":[[0,1],[2,3]]}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32'
    '","placements":[["tp","partial(sum)"]],"recipe":{"kind":"uniform","scale":1.0}},{"name":"w","shape":'
    '[2,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform","scale":1.0}},{"name":"w_2","shap'
    'e":[2,1],"dtype":"float32","placements":[],"recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nod'
    'es":[{"name":"x","op":"placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype'
    '":"float32","alias":0}},{"name":"w","op":"placeholder","target":"","args":[],"val":{"shape":[2,2],"s'
    'tride":[2,1],"dtype":"float32","alias":1}},{"name":"w_2","op":"placeholder","target":"","args":[],"v'
    'al":{"shape":[2,1],"stride":[1,1],"dtype":"float32","alias":2}},{"name":"matmul_all_reduce","op":"ca'
    'll_function","target":"tensor_cast::matmul_all_reduce","args":[{"node":"x"},{"node":"w"},null,{"rank'
    '_constant":"rank"},{"rank_constant":"dp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","al'
    'ias":3},"meta":{"cost_s":1e-06}},{"name":"matmul","op":"call_function","target":"aten::matmul","args'
    '":[{"node":"x"},{"node":"w"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":4},"meta'
    '":{"cost_s":1e-05}},{"name":"matmul_1","op":"call_function","target":"aten::matmul","args":[{"node":'
    '"w"},{"node":"w_2"}],"val":{"shape":[2,1],"stride":[1,1],"dtype":"float32","alias":5},"meta":{"cost_'
    's":1e-06}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"no'
    'de":"matmul_1"},{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[2,1],"stride":[1,1]'
    ',"dtype":"float32","alias":6},"meta":{"cost_s":1e-05}},{"name":"output","op":"output","target":"","a'
    'rgs":[{"tuple":[{"node":"matmul"},{"node":"all_reduce"},{"node":"matmul_all_reduce"}]}]}]},{"nodes":'
    '[{"name":"x","op":"placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"f'
    'loat32","alias":0}},{"name":"w","op":"placeholder","target":"","args":[],"val":{"shape":[2,2],"strid'
    'e":[2,1],"dtype":"float32","alias":1}},{"name":"w_2","op":"placeholder","target":"","args":[],"val":'
    '{"shape":[2,1],"stride":[1,1],"dtype":"float32","alias":2}},{"name":"matmul_all_reduce","op":"call_f'
    'unction","target":"tensor_cast::matmul_all_reduce","args":[{"node":"x"},{"node":"w"},null,{"rank_con'
    'stant":"rank"},{"rank_constant":"dp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias"'
    ':3},"meta":{"cost_s":1e-06}},{"name":"matmul","op":"call_function","target":"aten::matmul","args":[{'
    '"node":"x"},{"node":"w"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":4},"meta":{"'
    'cost_s":1e-06}},{"name":"matmul_1","op":"call_function","target":"aten::matmul","args":[{"node":"w"}'
    ',{"node":"w_2"}],"val":{"shape":[2,1],"stride":[1,1],"dtype":"float32","alias":5},"meta":{"cost_s":1'
    'e-06}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":'
    '"matmul_1"},{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[2,1],"stride":[1,1],"dt'
    'ype":"float32","alias":6},"meta":{"cost_s":1e-05}},{"name":"output","op":"output","target":"","args"'
    ':[{"tuple":[{"node":"matmul"},{"node":"all_reduce"},{"node":"matmul_all_reduce"}]}]}]}],"ranks":[{"g'
    'raph":0,"constants":{"rank":0,"dp":[0,2],"tp":[0,1]}},{"graph":1,"constants":{"rank":1,"dp":[1,3],"t'
    'p":[0,1]}},{"graph":1,"constants":{"rank":2,"dp":[0,2],"tp":[2,3]}},{"graph":0,"constants":{"rank":3'
    ',"dp":[1,3],"tp":[2,3]}}],"seed":0,"labels":["layers=0","rank-reduced","two-groups","reordered","ext'
    'ra-outputs","overlap","branches=2","all-gather","all-reduce","cat","fused-norm","fused-reduce","mark'
    'er","matmul","reduce-scatter","slice","split","unary","timed","rank-dependent-costs"],"streams":{"co'
    'mpute":[0],"comm":[1],"sync_overhead_s":1e-06,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
