import torch
import torchvision

model = torchvision.models.resnet50(num_classes=10).cuda()
optimizer = torch.optim.AdamW(model.parameters())


def step(images, labels):
    outputs = model(images)
    loss = torch.nn.functional.cross_entropy(outputs, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


for number in range(20):
    images = torch.randn(64, 3, 224, 224, device="cuda")
    labels = torch.randint(10, (64,), device="cuda")
    loss = step(images, labels)
print(f"loss {loss:.3f}")
