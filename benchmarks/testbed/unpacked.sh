#!/bin/sh
# For a machine on which nothing can be installed: the tools of iproute2 out of Debian packages.
#
#     apt-get download iproute2 libelf1 libbpf1 libmnl0 libxtables12 libcap2 libbsd0 libmd0 libtirpc3
#     export PATH=$(benchmarks/testbed/unpacked.sh PACKAGES FOLDER):$PATH
#
# Prints the folder for PATH. Its scripts name the libraries to the loader: LD_LIBRARY_PATH would
# reach what `ip netns exec` starts, and hide the machine's own libraries from it.
set -eu
for package in "$1"/*.deb; do dpkg -x "$package" "$2"; done
root=$(cd "$2" && pwd)
loader=$(ls /lib64/ld-linux-x86-64.so.2 /lib/ld-linux-aarch64.so.1 2>/dev/null | head -n 1)
libraries=$(find "$root" -name 'lib*.so.*' -exec dirname {} + | sort -u | paste -sd :)
mkdir -p "$root/tools"
for tool in ip tc; do
    program=$(find "$root/sbin" "$root/usr/sbin" "$root/bin" -name "$tool" -type f 2>/dev/null | head -n 1)
    printf '#!/bin/sh\nexec %s --library-path %s %s "$@"\n' "$loader" "$libraries" "$program" \
        >"$root/tools/$tool"
    chmod +x "$root/tools/$tool"
done
echo "$root/tools"
