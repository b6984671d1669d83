// Preloaded into mpiexec: what it would bind to every interface is bound to the loopback interface.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

int bind(int fd, const struct sockaddr* address, socklen_t length) {
  int (*next)(int, const struct sockaddr*, socklen_t) = dlsym(RTLD_NEXT, "bind");
  if (address && address->sa_family == AF_INET && length >= sizeof(struct sockaddr_in)) {
    struct sockaddr_in inet;
    memcpy(&inet, address, sizeof inet);
    if (inet.sin_addr.s_addr == htonl(INADDR_ANY)) inet.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return next(fd, (struct sockaddr*)&inet, sizeof inet);
  }
  if (address && address->sa_family == AF_INET6 && length >= sizeof(struct sockaddr_in6)) {
    struct sockaddr_in6 inet6;
    memcpy(&inet6, address, sizeof inet6);
    if (IN6_IS_ADDR_UNSPECIFIED(&inet6.sin6_addr)) inet6.sin6_addr = in6addr_loopback;
    return next(fd, (struct sockaddr*)&inet6, sizeof inet6);
  }
  return next(fd, address, length);
}
